"""Multi-scale deformable attention (arXiv:2010.04159): a query reads a few points of each level.

B images, S tokens of all levels, Q queries, M heads, L levels, P points, d width of a head, D Md.
A point's value is bilinear between its four pixels; outside its level everything is zero.
"""

from training.workloads.detection.attention.attention import IMPLEMENTATIONS as IMPLEMENTATIONS
from training.workloads.detection.attention.attention import Implementation as Implementation
from training.workloads.detection.attention.attention import (
    deformable_attention as deformable_attention,
)
from training.workloads.detection.attention.choice import choose as choose
