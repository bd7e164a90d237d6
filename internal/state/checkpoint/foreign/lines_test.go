//go:build linux

package foreign

import (
	"encoding/binary"
	"fmt"
	"math"

	"plimsoll/internal/state/checkpoint"
	"plimsoll/internal/state/checkpoint/shardtest"
)

// linesOf returns values as the programs in Python print them.
func linesOf(job []checkpoint.Shard) map[string]bool {
	lines, all := map[string]bool{}, map[string][3][]float32{}
	for _, s := range job {
		shardtest.AddValues(all, s.Pieces, s.State)
	}
	for _, s := range job {
		for _, p := range s.Pieces {
			for _, numbers := range all[p.Name] {
				shape := "["
				for i, n := range p.Shape {
					if i > 0 {
						shape += ", "
					}
					shape += fmt.Sprint(n)
				}
				var bytes []byte
				for _, x := range numbers {
					bytes = binary.LittleEndian.AppendUint32(bytes, math.Float32bits(x))
				}
				lines[fmt.Sprintf("%s %s] %x", p.Name, shape, bytes)] = true
			}
		}
	}
	return lines
}
