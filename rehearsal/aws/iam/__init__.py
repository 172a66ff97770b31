"""IAM of the embedded AWS: who calls, what the call is in IAM's words, and what policies say of it.

`evaluation` knows neither HTTP nor moto; `access` asks it about each request and keeps evidence.
"""
