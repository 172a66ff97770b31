#!/usr/bin/env bash
# codecarbon 3.3.2 knows no AWS region: its data of clouds are Google's alone. An offline tracker
# with cloud_provider="aws" logs that, and counts the average of the whole world in every region: in
# Stockholm eleven times Sweden's. With country_iso_code beside it, it counts the country's.
# Seen: 0.475 kg of CO2 per kWh in eu-north-1 and us-east-1, 0.041 with SWE beside eu-north-1.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet codecarbon==3.3.2
cd "$folder"
venv/bin/python - 2>/dev/null <<'PY'
import sys

from codecarbon import OfflineEmissionsTracker


def per_kwh(**where):
    tracker = OfflineEmissionsTracker(save_to_file=False, allow_multiple_runs=True, **where)
    tracker.start()
    sum(range(10**7))
    emitted = tracker.stop()
    seen = round(emitted / tracker.final_emissions_data.energy_consumed, 3)
    print(f"{where}: {seen} kg per kWh", flush=True)
    return seen


seen = [
    per_kwh(cloud_provider="aws", cloud_region="eu-north-1"),
    per_kwh(cloud_provider="aws", cloud_region="us-east-1"),
    per_kwh(cloud_provider="aws", cloud_region="eu-north-1", country_iso_code="SWE"),
    per_kwh(cloud_provider="gcp", cloud_region="europe-north1"),
]
sys.exit(seen != [0.475, 0.475, 0.041, 0.046])
PY
