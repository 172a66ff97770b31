"""The detection workload: DINO, a detector of the kind of DETR, on data in COCO's format."""
