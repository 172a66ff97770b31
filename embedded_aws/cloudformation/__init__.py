"""A CloudFormation engine: the embedded AWS deploys with it, review/ reads templates with it.

`service` has the API's operations, `engine` the stacks, and `resources/` creates each type through
its service's own API. The engine refuses what AWS refuses, in AWS's words, and never skips a
resource type that it does not know. It imports no other folder of ours; only `wire` uses moto.
"""
