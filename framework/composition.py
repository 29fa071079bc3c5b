"""The one door to Hydra: finds `conf/`, parses overrides, lists group options, composes a plain tree.

Everything of Hydra's that is not public API is imported here and nowhere else (tried on hydra-core 1.3.2 and 1.3.8):
`get_args_parser`, `create_config_search_path`, `ConfigLoaderImpl`. The public compose API has no way to add the
directory of `--config-dir` or to ask which options a group has.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from framework.problems import MISSING, ConfigError, Problem

HYDRA_VERSION_BASE = "1.3"
CONFIG_NAME = "config"


def conf_dir() -> Path:
    """Our `conf/`: inside the package in a wheel, beside it in a checkout. Raises FileNotFoundError."""
    package = Path(__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / f"{CONFIG_NAME}.yaml").is_file():
            return candidate
    raise FileNotFoundError(f"{package / 'conf'} and {package.parent / 'conf'} hold no {CONFIG_NAME}.yaml; reinstall")


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Hydra's flags and overrides in any order, and the flags alone as they were typed.

    Hydra's own parser refuses an override that stands after a flag that stands after an override.
    """
    parser = get_args_parser()
    parser.prog = "python -m framework"
    arguments = parser.parse_intermixed_args(list(argv))
    flags = list(argv)
    for override in arguments.overrides:
        flags.remove(override)
    return arguments, flags


class Composer:
    """Composes configs from our `conf/`, a directory of the user's and overrides; keeps what it has composed."""

    def __init__(
        self, *, config_path: str | None = None, config_name: str | None = None, config_dir: str | None = None
    ) -> None:
        version.setbase(HYDRA_VERSION_BASE)
        setup_globals()
        search_path = create_config_search_path(str(Path(config_path).absolute() if config_path else conf_dir()))
        if config_dir is not None:
            if not Path(config_dir).is_dir():
                raise ConfigError([Problem("--config-dir", config_dir, "must be a folder", "give an existing folder")])
            # Where `hydra.main` puts it: after ours, so that it adds options and cannot silently replace one.
            search_path.prepend(
                "command-line", f"file://{Path(config_dir).absolute()}", anchor=SearchPathQuery(provider="schema")
            )
        self.config_name = config_name or CONFIG_NAME
        self._loader = ConfigLoaderImpl(config_search_path=search_path)
        self._parser = OverridesParser.create(config_loader=self._loader)
        self._composed: dict[tuple[str, ...], tuple[dict[str, Any], dict[str, Any]]] = {}

    def parse(self, text: str) -> Override:
        """One override. Raises HydraException on a syntax error."""
        return self._parser.parse_overrides([text])[0]

    def options(self, group: str, search: Sequence[str] = ()) -> list[str]:
        """Options of a group, empty when there is no such group; `search` holds `hydra.searchpath` overrides."""
        return self._loader.get_group_options(group, ObjectType.CONFIG, self.config_name, list(search))

    def groups(self) -> list[str]:
        """Names of all groups except Hydra's own."""
        return [group for group in self._loader.get_group_options("", ObjectType.GROUP) if group != "hydra"]

    def tree(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The config of one job as plain containers; values that must be given and are not stand as "???".

        Raises ConfigError when a file or an interpolation is at fault.
        """
        return self._compose(overrides)[0]

    def hydra(self, overrides: Sequence[str]) -> dict[str, Any]:
        """Hydra's own part of the config: mode, sweeper, chosen options."""
        return self._compose(overrides)[1]

    def _compose(self, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        wanted = tuple(overrides)
        if wanted not in self._composed:
            try:
                config = self._loader.load_configuration(self.config_name, list(overrides), RunMode.RUN)
                self._composed[wanted] = plain_tree(config), OmegaConf.to_container(config.hydra, resolve=False)
            except (HydraException, OmegaConfBaseException) as error:
                cause = error.__cause__ if not str(error) and error.__cause__ else error
                lines = " ".join(line.strip() for line in str(cause).splitlines() if line.strip())
                problem = Problem("config files", MISSING, lines, "correct the file or override named")
                raise ConfigError([problem]) from None
        return self._composed[wanted]


def plain_tree(config: Any) -> dict[str, Any]:
    """A composed DictConfig without Hydra's part, interpolations resolved, as plain containers."""
    if "hydra" in config:
        HydraConfig.instance().set_config(config)
        config = config.copy()
        OmegaConf.set_readonly(config, False)
        with open_dict(config):
            del config["hydra"]
    tree: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=False)
    assert isinstance(tree, Mapping)
    return dict(tree)
