"""The machine images that AWS publishes in SSM parameters: those of the Deep Learning AMI."""

from typing import Any

from moto.core.utils import utcnow
from moto.ec2.models import ec2_backends
from moto.ssm import models

ROOT = "/aws/service/deeplearning/ami"
# The versions and the date in the names are from the release notes.
PYTORCH_LINES = (
    ("2.13", "ubuntu-26.04"),
    ("2.12", "ubuntu-24.04"),
    ("2.12", "amazon-linux-2023"),
    ("2.11", "ubuntu-24.04"),
    ("2.10", "ubuntu-24.04"),
    ("2.9", "ubuntu-24.04"),
    ("2.8", "ubuntu-24.04"),
    ("2.7", "ubuntu-22.04"),
)
BASE_LINES = ("ubuntu-22.04", "ubuntu-24.04", "amazon-linux-2023")


def _title(system: str) -> str:
    return system.replace("-", " ").title()


def offered_images() -> dict[str, str]:
    """Return image names by the SSM parameter that names the latest build."""
    driver = "Deep Learning OSS Nvidia Driver AMI GPU"
    images = {
        f"{ROOT}/x86_64/oss-nvidia-driver-gpu-pytorch-{version}-{system}/latest/ami-id": (
            f"{driver} PyTorch {version} ({_title(system)}) 20261009"
        )
        for version, system in PYTORCH_LINES
    }
    for system in BASE_LINES:
        name = f"{ROOT}/x86_64/base-oss-nvidia-driver-gpu-{system}/latest/ami-id"
        images[name] = f"Deep Learning Base OSS Nvidia Driver GPU AMI ({_title(system)}) 20261009"
    return images


def offer_images(ec2: Any, ssm_backend: Any, account: str) -> None:
    """Register the images in EC2 and name each in SSM.

    SSM's API refuses names under /aws, as on AWS: the parameters go into moto's backend.
    """
    backend = ec2_backends[account][ec2.meta.region_name]
    for parameter, name in offered_images().items():
        image_id = ec2.register_image(Name=name, Description=name)["ImageId"]
        if "Amazon Linux" in name:
            # moto's API ignores this argument.
            backend.amis[image_id].root_device_name = "/dev/xvda"
        # Any: mypy takes the class for abstract, though moto itself creates it like this.
        make: Any = models.Parameter
        ssm_backend._parameters[parameter].append(
            make(
                account_id=account,
                name=parameter,
                value=image_id,
                parameter_type="String",
                description=name,
                allowed_pattern=None,
                keyid=None,
                last_modified_date=utcnow(),
                version=1,
                data_type="aws:ec2:image",
                tier="Standard",
            )
        )
