package evidence

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
)

// longLog returns a log of so many lines, as training prints them.
func longLog(lines int) []byte {
	var b bytes.Buffer
	for i := range lines {
		switch i % 10 {
		case 0:
			fmt.Fprintf(&b, "[2026-11-23 03:04:05,%03d] [INFO] [logging.py:128:log_dist] [Rank 0] step=%d, skipped=0, "+
				"lr=[1e-05], mom=[(0.9, 0.95)]\n", i%1000, i)
		case 1:
			fmt.Fprintf(&b,
				"[rank%d]: W1123 03:04:05.123456 140 torch/_dynamo/utils.py:1] something was recompiled\n", i%8)
		case 2:
			fmt.Fprintf(&b, "\r %d%%|###       | %d/100000 [00:34<04:10,  2.85s/it]\n", i%100, i)
		case 3:
			fmt.Fprintf(&b,
				"{'loss': 1.%04d, 'grad_norm': 0.9, 'learning_rate': 1.2e-05, 'epoch': 0.%03d}\n", i%10000, i%1000)
		default:
			fmt.Fprintf(&b,
				"INFO 2026-11-23 03:04:05 data.py:%d] shard %d of the dataset has %d documents and %d tokens\n",
				i, i, i*3, i*17)
		}
	}
	return b.Bytes()
}

func BenchmarkRead(b *testing.B) {
	text := longLog(200_000)
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		if _, err := Read("log", bytes.NewReader(text)); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkReadJSONLines(b *testing.B) {
	text := strings.Repeat(`{"log":"shard 17 of the dataset has 100 documents and 100000 tokens, all is well\n","stream":"stdout",`+
		`"time":"2026-11-23T03:04:05.123456789Z"}`+"\n", 100_000)
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		if _, err := Read("log", strings.NewReader(text)); err != nil {
			b.Fatal(err)
		}
	}
}
