"""The config of a run. It is composed from YAML by Hydra, translated if it has other systems' keys, checked
and completed."""

from turnwise.config.compose import find_config
from turnwise.config.describe import SettingsTable, describe
from turnwise.config.dump import Difference, differences, dump_yaml
from turnwise.config.load import load_any_config, load_config, parse_config
from turnwise.config.missing import not_here, require, unavailable, unavailable_to_play
from turnwise.config.schema import AgenticConfig
from turnwise.config.sft import SFTConfig
from turnwise.config.without_effect import ineffective
