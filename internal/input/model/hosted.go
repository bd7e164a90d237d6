package model

import "strings"

// HostsExperts returns the model without the parameters of its experts, and the number of their elements: KTransformers
// has them on the host, and makes a linear module of every router (kt_kernel/sft/wrapper.py and layer.py). Experts that
// every token passes stay.
func (m *Model) HostsExperts() (*Model, int64) {
	network := m.Network.clone()
	without := map[string][]Parameter{}
	for _, b := range network.Blocks() {
		x := b.FeedForward.Mixture
		if x == nil {
			continue
		}
		x.Hosted = true
		for _, path := range []string{x.GateUp, x.Down} {
			without[strings.TrimSuffix(path, ".weight")] = nil
		}
		x.GateUp, x.Down = "", ""
		for i := range x.Experts {
			e := &x.Experts[i]
			without[e.Gate], without[e.Up], without[e.Down] = nil, nil, nil
			e.Gate, e.Up, e.Down = "", "", ""
		}
	}
	hosting := *m
	hosting.Network, hosting.Parameters = network, replaced(m.Parameters, without)
	return &hosting, m.Elements() - hosting.Elements()
}
