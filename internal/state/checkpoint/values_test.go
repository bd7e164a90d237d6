//go:build linux

package checkpoint

import (
	"encoding/binary"
	"fmt"
	"math"

	"plimsoll/internal/state/optim/kernel"
	"plimsoll/internal/state/shard"
)

// values are the fp32 numbers that a job holds of every parameter: the master
// weights and the moments, as an update would see them.
func values(job []Shard) map[string][3][]float32 {
	all := map[string][3][]float32{}
	for _, s := range job {
		flat := [3][]float32{}
		for i := range flat {
			flat[i] = make([]float32, s.State.Config().Elements)
		}
		s.State.Each(func(at shard.Chunk, c kernel.Chunk) {
			for i := range c.Len() {
				flat[0][at.First+int64(i)] = c.MasterWeight(s.Format, i)
				for m := range s.Format.Algorithm.Moments() {
					flat[1+m][at.First+int64(i)] = c.Moment(m, i)
				}
			}
		})
		at := int64(0)
		for _, p := range s.Pieces {
			own, ok := all[p.Name]
			if !ok {
				n, _ := p.Elements()
				own = [3][]float32{make([]float32, n), make([]float32, n), make([]float32, n)}
				all[p.Name] = own
			}
			for i := range own {
				copy(own[i][p.First:p.First+p.Count], flat[i][at:])
			}
			at += p.Count
		}
	}
	return all
}

// linesOf returns values as the programs in Python print them.
func linesOf(job []Shard) map[string]bool {
	lines := map[string]bool{}
	for _, s := range job {
		for _, p := range s.Pieces {
			for _, numbers := range values(job)[p.Name] {
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
