"""The demo: deploy, train, interrupt, resume, finish; prove that nothing is lost.

`demo` runs the phases, `fleet` boots machines and takes them away, `actions` defines what happens
to a run and when; `trained` is what trains; `receipt` and `report` show the outcome, which
`run_files` reads from outside the machines. Drills run on the same parts.
"""
