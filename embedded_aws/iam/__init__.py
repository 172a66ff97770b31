"""IAM of the embedded AWS: who calls, what the call is in IAM's terms, and what policies rule.

`evaluation` knows neither HTTP nor moto; `access` asks it about each request and keeps evidence.
"""
