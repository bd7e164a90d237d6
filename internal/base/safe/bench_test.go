package safe

import (
	"strings"
	"testing"
)

// BenchmarkText is of a record of a recording, which has no secret.
func BenchmarkText(b *testing.B) {
	record := strings.Repeat(`{"pid":13082,"role":"rank","name":"python","resident":{"anonymous_bytes":6434816,`+
		`"shared_memory_bytes":0,"file_bytes":16703488},"proportional_age_ns":7546688,"locked_limit_bytes":8388608},`, 20)
	b.SetBytes(int64(len(record)))
	for b.Loop() {
		_ = Text(record)
	}
}
