"""What a change of the code does to what is deployed: to data, to a run, to permissions, to cost.

Pure functions over two synthesized assemblies; it deploys nothing. It may use sizing/ (prices) and
cloudformation/ (schemas, references). Run it: python -m review main
"""
