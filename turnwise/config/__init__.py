"""The config of a run. It is composed from YAML by Hydra, translated if it has other systems' keys, checked
and completed."""

from turnwise.config.checks.missing import not_here, require, unavailable, unavailable_to_play
from turnwise.config.checks.without_effect import ineffective
from turnwise.config.read.compose import find_config
from turnwise.config.read.load import load_any_config, load_config, parse_config
from turnwise.config.schema.agentic import AgenticConfig
from turnwise.config.schema.sft import SFTConfig
from turnwise.config.show.describe import describe
from turnwise.config.show.dump import Difference, differences, dump_yaml
from turnwise.config.show.settings_table import SettingsTable
