"""The settings of training, as train.toml has them: `train` reads them, converters of other tools' files write them."""
