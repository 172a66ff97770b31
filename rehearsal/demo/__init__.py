"""The demo: deploy, train, interrupt, resume, finish; prove that nothing is lost.

`demo` runs the phases, `fleet` boots machines and takes them away, `action` defines what happens
when, `interruptions` steps the plan; `receipt` and `report` show the outcome, which `run_files`
reads from outside the machines. Drills run on the same parts.
"""
