#!/usr/bin/env bash
# cmaes 0.13.1: CMA, SepCMA, CMAwM, MAPCMA and CatCMA leave their random numbers out when they are
# pickled, and begin with new ones, from no seed, when they are read: a search that was saved in the
# middle goes on in another way at each resume, although seed= is given. XNES and CatCMAwM keep
# them. With `_rng` pickled beside it and set again SepCMA is exact, CMA and MAPCMA to 3e-15.
# Seen: 5 of 7 go on with other points, two resumes of one file with two different ones.
set -o errexit -o nounset -o pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
VIRTUAL_ENV=$folder/venv ${PIP:-"$folder/venv/bin/pip"} install --quiet \
  cmaes==0.13.1 numpy==2.4.6 scipy==1.17.1
cd "$folder"
venv/bin/python - <<'PY'
import pickle
import sys

import cmaes
import numpy as np

SEEDED = {"sigma": 1.3, "seed": 1}
RANGE = np.array([[-5, 5]] * 3)
SEARCHES = {
    "CMA": lambda: cmaes.CMA(np.ones(3), **SEEDED),
    "SepCMA": lambda: cmaes.SepCMA(np.ones(3), **SEEDED),
    "MAPCMA": lambda: cmaes.MAPCMA(np.ones(3), **SEEDED),
    "CMAwM": lambda: cmaes.CMAwM(np.ones(3), **SEEDED, bounds=RANGE, steps=np.array([0, 1, 0.0])),
    "CatCMA": lambda: cmaes.CatCMA(np.ones(3), **SEEDED, cat_num=np.array([3, 3])),
    "XNES": lambda: cmaes.XNES(np.ones(3), **SEEDED),
    "CatCMAwM": lambda: cmaes.CatCMAwM(x_space=RANGE, z_space=[[0, 1, 2]], c_space=[3, 3], seed=1),
}


def asked(search):
    """A point to evaluate, and what is told of it."""
    answer = search.ask()
    if isinstance(search, cmaes.CatCMAwM):
        return answer.x, answer
    if isinstance(search, cmaes.CatCMA):
        return answer[0], answer
    return answer if isinstance(search, cmaes.CMAwM) else (answer, answer)


def points(search, generations):
    tried = []
    for _ in range(generations):
        told = []
        for _ in range(search.population_size):
            point, answer = asked(search)
            tried.append(point)
            told.append((answer, float(np.square(point).sum())))
        search.tell(told)
    return np.array(tried)


seen = {}
for name, started in SEARCHES.items():
    whole = points(started(), 10)
    repeatable = np.array_equal(whole, points(started(), 10))
    search = started()
    done = len(points(search, 5))
    saved = pickle.dumps(search)
    first, second = (points(pickle.loads(saved), 5) for _ in range(2))
    seen[name] = np.array_equal(first, whole[done:]), np.array_equal(first, second)
    exactly, alike = seen[name]
    print(f"{name}: repeatable {repeatable}, resumed exactly {exactly}, two resumes alike {alike}")
    if not repeatable:
        sys.exit(1)
keeps = [name for name, each in seen.items() if each == (True, True)]
loses = [name for name, each in seen.items() if each == (False, False)]
sys.exit(not (keeps == ["XNES", "CatCMAwM"] and len(loses) == 5))
PY
