"""How good the models are: published runs and the seed documents' tables beside our figures.

Promises that misses stay in the tables. The thresholds of sizing/plan/rules.json are those of seed
documents 000 (samples, batch, jobs, hours, model size, team, Spot) and 004 (an idle inference GPU);
no other room knows of these documents. Uses sizing/plan, sizing/models and sizing/catalogue.
"""
