package allocator

import (
	"testing"

	"plimsoll/internal/base/ledger"
)

// event allocates a size, or frees what an earlier event allocated.
type event struct {
	size   ledger.Bytes
	frees  int
	stream int
}

// transformer makes steps of training of a decoder: weights that stay, and for
// every layer activations that live until its backward pass, temporaries that
// do not, and gradients that live until the update.
func transformer(layers, events int) []event {
	all := []event{}
	allocate := func(size ledger.Bytes, stream int) int {
		all = append(all, event{size: size, stream: stream, frees: -1})
		return len(all) - 1
	}
	free := func(which ...int) {
		for _, i := range which {
			all = append(all, event{frees: i})
		}
	}
	const hidden, tokens = 4096, 2048
	for range layers {
		for _, elements := range []ledger.Bytes{4 * hidden * hidden, 3 * hidden * 11008, hidden, hidden} {
			allocate(2*elements, 0)
		}
	}
	for step := 0; len(all) < events; step++ {
		saved, gradients := make([][]int, layers), []int{}
		length := ledger.Bytes(tokens - step%7*129) // as batches differ
		for layer := range layers {
			for _, width := range []ledger.Bytes{hidden, 3 * hidden, hidden, 11008, 11008, 1, 1, 32} {
				temporary := allocate(4*length*width/3, 0)
				saved[layer] = append(saved[layer], allocate(2*length*width, 0), allocate(64, 0))
				free(temporary)
			}
			gathered := allocate(2*hidden*11008, 1)
			free(gathered)
		}
		for layer := layers - 1; layer >= 0; layer-- {
			for i := len(saved[layer]) - 1; i >= 0; i-- {
				temporary := allocate(2*length*hidden, 0)
				free(saved[layer][i], temporary)
			}
			gradients = append(gradients, allocate(8*hidden*hidden, 0), allocate(6*hidden*11008, 0))
		}
		free(gradients...)
	}
	return all[:events]
}

func benchmarkReplay(b *testing.B, configuration Configuration) {
	events := transformer(32, 100_000)
	blocks := make([]Block, len(events))
	b.ReportAllocs()
	for b.Loop() {
		c := NewCUDA(configuration, 0)
		for i, e := range events {
			var err error
			if e.frees >= 0 {
				err = c.Free(blocks[e.frees])
			} else {
				blocks[i], err = c.Allocate(e.size, e.stream)
			}
			if err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(events)), "ns/event")
}

func BenchmarkReplay(b *testing.B) {
	b.Run("default", func(b *testing.B) { benchmarkReplay(b, Configuration{}) })
	b.Run("expandable", func(b *testing.B) { benchmarkReplay(b, Configuration{Expandable: true}) })
}
