"""The imagenet workload: ResNets that classify images, read from shards of them."""
