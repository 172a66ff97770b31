"""The kill table: public trainers and plain save habits, killed on purpose, alone and under us."""
