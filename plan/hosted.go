package plan

import (
	"fmt"

	"plimsoll/dtype"
	"plimsoll/engine"
	"plimsoll/ledger"
	"plimsoll/optim/kernel"
)

// Hosted is what a node holds when Plimsoll carries the optimizer state of the
// job there.
type Hosted struct {
	State             string       `json:"state"`
	Moments           string       `json:"moments"`
	Bytes             ledger.Bytes `json:"bytes"`
	BytesPerParameter float64      `json:"bytes_per_parameter"`
	Why               string       `json:"why"`
}

// hosted are the formats of Plimsoll's own, the gradients and 16-bit
// parameters in host memory included, with the arenas that they would map.
func (s *simulation) hosted() []Hosted {
	var list []Hosted
	trained := s.trainedElements()
	each := (trained + int64(s.World) - 1) / int64(s.World)
	if each == 0 || !kernelAdam(s.Optimizer.Name) {
		return nil
	}
	for _, f := range []kernel.Format{
		{State: kernel.Split, Moments: kernel.MomentsFP32, Parameter: dtype.BF16, Gradient: dtype.BF16},
		{State: kernel.Split, Moments: kernel.MomentsBF16, Parameter: dtype.BF16, Gradient: dtype.BF16},
		{State: kernel.Split, Moments: kernel.MomentsInt8, Parameter: dtype.BF16, Gradient: dtype.BF16},
		{State: kernel.FP32, Moments: kernel.MomentsFP32, Parameter: dtype.BF16, Gradient: dtype.F32},
	} {
		f.Algorithm = kernel.Adam
		var bytes ledger.Bytes
		for _, arena := range (engine.ShardConfig{Elements: each, Format: f}).Arenas() {
			bytes += arena.Size
		}
		list = append(list, Hosted{
			State: f.State.String(), Moments: f.Moments.String(), Bytes: bytes * ledger.Bytes(s.RanksPerNode),
			BytesPerParameter: float64(bytes) / float64(each),
			Why: fmt.Sprintf("%d ranks x %s parameters, everything included; plimsoll rehearse measures it",
				s.RanksPerNode, ledger.Count(each)),
		})
	}
	return list
}

// kernelAdam says whether the optimizer is one of Adam's, whose states these
// formats hold.
func kernelAdam(name string) bool { return name == "adamw" || name == "adam" || name == "adamw-apex" }
