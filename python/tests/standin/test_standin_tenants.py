"""Tenants of a model on a device: each has the bits that it has on the host."""

import copy

import torch

import plimsoll.torch
from plimsoll.torch import Tenants
from test_crash import digest
from test_tenants import NAMES, alone, network, train


def test_bits_of_the_host(service, tmp_path):
    model = network().to("standin")
    tenants = Tenants(model.parameters(), optimizer=plimsoll.torch.AdamW, lr=1e-2, folder=tmp_path, resident=3, socket=service.socket)
    for turn in range(3):
        for name in NAMES:
            train(model, tenants.switch(name), range(2 * turn, 2 * turn + 2))
    for name in NAMES:
        tenants.switch(name)
        assert digest(copy.deepcopy(model).cpu()) == alone(name, 6), name
    with torch.no_grad():
        model[0].weight.fill_(2.0)
    tenants.switch("a")
    assert not (model[0].weight.cpu() == 2).any()
    tenants.switch(NAMES[-1])
    assert (model[0].weight.cpu() == 2).all()
