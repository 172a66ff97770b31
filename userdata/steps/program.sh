#!/usr/bin/env bash
# Boot step of a user's own code: installs what it requires. A program gets /opt/ml on the data
# volume, because the root volume is full of the image.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

if [[ $WORKLOAD == program ]]; then
    mkdir -p "$root$DATA_MOUNT/ml"
    if [[ -d $root/opt/ml && ! -L $root/opt/ml ]] && ! rmdir "$root/opt/ml"; then
        refuse "/opt/ml of this image is a folder with files in it, where the program's belong;" \
            "use a Deep Learning AMI (context pytorch_ami_parameter)"
    fi
    ln -sfn "$root$DATA_MOUNT/ml" "$root/opt/ml"
fi
exec python3 -m userdata.program_environment
