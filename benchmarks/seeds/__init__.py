"""The seed documents' tables and our figures: what holds, what was corrected, what nobody knows.

`python -m benchmarks evidence NUMBER` shows them. No other room knows of these documents but by the
thresholds of sizing/plan/rules.json, which are those of 000 (samples, batch, jobs, hours, model
size, team, Spot) and 004 (an idle inference GPU). Uses sizing/.
"""
