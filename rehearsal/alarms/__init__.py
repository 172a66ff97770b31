"""Tries every alarm of the template on its fault and on healthy runs: `python -m rehearsal alarms`.

Alarms are evaluated as CloudWatch's documentation says; metrics come from the publisher and the
agent's configuration in userdata/. It may not use any other folder of rehearsal/.
"""
