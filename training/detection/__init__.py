"""Seed document 003: DINO, a detector that learns from boxes in COCO's format."""
