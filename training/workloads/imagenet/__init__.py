"""The imagenet workload: ResNets that classify images, which are read from shards."""
