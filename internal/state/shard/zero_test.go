package shard

import (
	"testing"

	"pgregory.net/rapid"
)

func TestZeROCoversEveryParameterOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		elements := rapid.Int64Range(1, 1<<50).Draw(t, "elements")
		ranks := rapid.IntRange(1, 3000).Draw(t, "ranks")
		parts, err := ZeRO(elements, ranks)
		if err != nil || len(parts) != ranks {
			t.Fatalf("%d parts, %v", len(parts), err)
		}
		next, padding := int64(0), int64(0)
		for i, part := range parts {
			if part.Count > 0 && part.First != next {
				t.Fatalf("rank %d starts at %d, not at %d", i, part.First, next)
			}
			if part.Count < 0 || part.Padding < 0 || part.Held() != parts[0].Held() || part.Held()%2 != 0 {
				t.Fatalf("rank %d has %+v, rank 0 %+v", i, part, parts[0])
			}
			next += part.Count
			padding += part.Padding
		}
		if next != elements {
			t.Fatalf("the parts cover %d of %d parameters", next, elements)
		}
		// DeepSpeed pads to the next multiple of 2 x ranks, no further.
		if padding >= 2*int64(ranks) {
			t.Fatalf("%d elements of padding for %d ranks", padding, ranks)
		}
	})
}

func TestZeRORefusesNonsense(t *testing.T) {
	for _, test := range []struct {
		elements int64
		ranks    int
	}{{0, 1}, {-1, 1}, {10, 0}, {10, -2}} {
		if _, err := ZeRO(test.elements, test.ranks); err == nil {
			t.Errorf("%d parameters among %d ranks: no error", test.elements, test.ranks)
		}
	}
}
