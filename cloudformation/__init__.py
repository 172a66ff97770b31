"""A CloudFormation engine: the embedded AWS deploys with it, review/ reads templates with it.

`service` has the API's operations, `engine` the stacks, `resources/` how each type is created by
its service's own API. It refuses what AWS refuses, in AWS's words, and never skips a resource type
that it does not know. It imports no other folder of ours; only `wire` knows moto.
"""
