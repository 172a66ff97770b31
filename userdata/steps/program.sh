#!/usr/bin/env bash
# Boot step of a user's own code: installs what it requires. A program gets /opt/ml on the data
# volume, because the image fills the root volume.
set -o errexit -o nounset -o pipefail
source userdata/lib.sh

if [[ $WORKLOAD == program ]]; then
    mkdir -p "$root$DATA_MOUNT/ml"
    if [[ -d $root/opt/ml && ! -L $root/opt/ml ]] && ! rmdir "$root/opt/ml"; then
        refuse "/opt/ml of this image has files in it, but it is where the program's files go;" \
            "use a Deep Learning AMI (context pytorch_ami_parameter)"
    fi
    ln -sfn "$root$DATA_MOUNT/ml" "$root/opt/ml"
fi
exec python3 -m userdata.program_environment
