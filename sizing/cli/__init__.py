"""The commands of `python -m sizing`, one module each: HELP, add_arguments(parser), run(arguments).

Uses every other package.
"""
