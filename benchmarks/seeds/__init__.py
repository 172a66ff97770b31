"""The seed documents' tables and our figures: what holds, what was corrected, what is unknown.

`python -m benchmarks evidence NUMBER` shows them. Nothing else depends on these documents, except
the thresholds in sizing/plan/rules.json, which are from 000 (samples, batch, jobs, hours, model
size, team, Spot) and 004 (an idle inference GPU). Uses sizing/.
"""
