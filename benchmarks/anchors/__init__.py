"""The models that the seed documents name, as `python -m training count` counts them."""
