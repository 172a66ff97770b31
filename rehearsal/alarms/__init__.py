"""Alarms rehearsed: their own definitions, evaluated as CloudWatch's documentation says it does."""
