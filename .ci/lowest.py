"""Print the lower end of every dependency in a pyproject.toml, as constraints for pip."""

import re
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    project = tomllib.load(file)["project"]

extras = project["optional-dependencies"]
for requirement in [*project["dependencies"], *extras["test"]]:
    # Constraints take no extras, so mlx[cpu] and mlx are one line.
    name, version = re.fullmatch(
        r"([\w.-]+)(?:\[\w+\])?>=([\w.]+)[^;]*(?:;.*)?", requirement
    ).groups()
    print(f"{name}=={version}")
