#!/usr/bin/env python3
"""Writes the checkpoint of a small model with random weights, in several files.

    checkpoint.py config.json folder

testdata/checkpoint was made from testdata/checkpoint/config.json this way.
"""

import sys

import transformers

config = transformers.AutoConfig.from_pretrained(sys.argv[1])
model = getattr(transformers, config.architectures[0])(config)
model.save_pretrained(sys.argv[2], max_shard_size="8KB")
