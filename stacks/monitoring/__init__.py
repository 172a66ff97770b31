"""Monitoring of a run: metrics that outlive an instance, alarms on them, one dashboard."""
