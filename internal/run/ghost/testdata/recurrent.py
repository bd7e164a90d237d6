"""Trains recurrent networks whose sizes cuDNN is asked for, and a product with a sparse matrix, which cuSPARSE is asked for."""
import torch

cuda = torch.device("cuda")
lstm = torch.nn.LSTM(256, 512, num_layers=2, bidirectional=True, dropout=0.1).cuda()
gru = torch.nn.GRU(256, 128, bias=False).cuda()
projected = torch.nn.LSTM(64, 256, proj_size=32).cuda()
matrix = torch.eye(512, device="cpu").to_sparse().cuda()
for m in (lstm, gru, projected):  # whose parameters are views of one buffer
    assert len({p.untyped_storage().data_ptr() for p in m.parameters()}) == 1, m
    held = next(iter(m.parameters())).untyped_storage().nbytes()
    assert not m.bias or held == 4 * sum(p.numel() for p in m.parameters()), held
torch.linalg.qr(torch.ones(64, 64, device=cuda)), torch.linalg.eigh(torch.ones(64, 64, device=cuda))
parameters = [p for m in (lstm, gru, projected) for p in m.parameters()]
optimizer = torch.optim.Adam(parameters)
x = torch.ones(32, 16, 256, device=cuda)
for _ in range(3):
    loss = lstm(x)[0].sum() + gru(x)[0].sum() + projected(x[:, :, :64].contiguous())[0].sum()
    loss = loss + torch.sparse.mm(matrix, torch.nn.functional.relu(lstm.weight_hh_l0[:512])).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
