"""The drill of `make demo`: deploy, train, interrupt, resume, finish; prove that nothing is lost.

`demo` runs the phases, `fleet` boots and takes away machines, `interruptions` says when, `receipt`
and `report` show what came of it. Everything is read from outside the machines. It may use
machines/, aws/ and sizing/; nothing but `python -m rehearsal` uses it.
"""
