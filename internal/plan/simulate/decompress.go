package simulate

import (
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/recipe"
)

// decompress makes ordinary weights of those that compressed-tensors has packed. The first forward pass does it, and
// they stay. Where the release replaces the packed weights, it holds what the ordinary ones take more.
func (s *simulation) decompress() {
	q := s.Quantization
	if q == nil || q.Method != recipe.CompressedTensors || s.decompressed != nil {
		return
	}
	for _, p := range s.parameters {
		if p.StoredBytes == 0 {
			continue
		}
		bytes := p.Elements * p.DType.Size()
		if s.ReplacesPacked() {
			bytes -= p.StoredBytes
		}
		s.decompressed = append(s.decompressed, s.gpu.hold(bytes, ledger.Parameters, s.whyDecompressed))
	}
}

// whyDecompressed is the end of the reason for the size of the parameters: how compressed-tensors holds them.
func (s *simulation) whyDecompressed() string {
	switch q := s.Quantization; {
	case q == nil || q.Method != recipe.CompressedTensors:
		return ""
	case s.ReplacesPacked():
		return ", which compressed-tensors makes of packed ones in the first forward pass"
	}
	return ", which compressed-tensors makes of packed ones in the first forward pass and holds beside them"
}
