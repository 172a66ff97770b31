"""The detection workload: DINO, a DETR-like detector, on data in COCO's format."""
