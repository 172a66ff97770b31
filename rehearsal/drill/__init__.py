"""The drill of `make demo`: deploy, train, interrupt, resume, finish; prove that nothing is lost.

`demo` runs the phases, `fleet` boots machines and takes them away, `interruptions` says when;
`lineage`, `receipt` and `report` show the outcome, read from outside the machines. It may use
machines/, aws/, sizing/ and contract/; only `python -m rehearsal` uses it.
"""
