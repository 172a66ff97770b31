"""The models that the seed documents name, in the form that `python -m training count` takes."""
