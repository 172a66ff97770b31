"""Parts of images are drawn, and resized, as torchvision does it: so published recipes do."""

import pytest
import torch
from torchvision.transforms import v2

from training.workloads.imagenet.samples import eval_image, random_box


def test_parts_have_the_areas_and_aspects_of_torchvision_s_default() -> None:
    height, width, count = 400, 500, 3000
    rng = torch.Generator().manual_seed(0)
    ours = torch.tensor([random_box(height, width, rng)[2:] for _ in range(count)])
    crop, image = v2.RandomResizedCrop(224), torch.empty(3, height, width, dtype=torch.uint8)
    torch.manual_seed(0)
    drawn = [crop.make_params([image]) for _ in range(count)]
    theirs = torch.tensor([(part["height"], part["width"]) for part in drawn])
    levels = torch.tensor([0.01, 0.25, 0.5, 0.75, 0.99], dtype=torch.float64)
    found = [
        [quotient.double().quantile(levels) for quotient in (h * w / (height * width), w / h)]
        for h, w in (ours.T, theirs.T)
    ]
    torch.testing.assert_close(found[0], found[1], rtol=0.04, atol=0.01)


@pytest.mark.parametrize(("height", "width"), [(375, 500), (301, 257), (224, 224)])
def test_an_evaluated_image_is_torchvision_s_resize_and_center_crop(
    height: int, width: int
) -> None:
    rng = torch.Generator().manual_seed(1)
    image_HWC = torch.randint(256, (height, width, 3), generator=rng, dtype=torch.uint8)
    theirs = v2.Compose([v2.Resize(256, antialias=True), v2.CenterCrop(224)])
    expected_CHW = theirs(image_HWC.permute(2, 0, 1))
    torch.testing.assert_close(eval_image(image_HWC, 224).permute(2, 0, 1), expected_CHW)
