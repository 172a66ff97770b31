"""run.env is found in the user data that the stack renders."""

import pytest

from rehearsal.run_env import parse_run_env


def test_the_variables_of_the_here_document_are_read() -> None:
    user_data = (
        "#!/bin/bash\nmkdir -p /etc/training\ncat > run.env <<'RUN_ENV'\n"
        '# a comment\nRUN_ID=run-1\nOVERRIDES="a=1 b=2"\nRUN_ENV\nexec true\n'
    )
    assert parse_run_env(user_data) == {"RUN_ID": "run-1", "OVERRIDES": "a=1 b=2"}


def test_fails_without_a_here_document() -> None:
    with pytest.raises(ValueError, match="holds no here-document"):
        parse_run_env("#!/bin/bash\nexec true\n")
