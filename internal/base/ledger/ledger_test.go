package ledger

import (
	"math"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestBytesText(t *testing.T) {
	for b, want := range map[Bytes]string{
		0: "0 B", 1: "1 B", -7: "-7 B", 1023: "1023 B",
		KiB: "1.00 KiB", 1536: "1.50 KiB", 10 * KiB: "10.0 KiB", 100 * KiB: "100 KiB", 999 * KiB: "999 KiB",
		1023*KiB + 511: "1023 KiB", 1023*KiB + 512: "1.00 MiB", MiB: "1.00 MiB",
		14 * 494_032_768: "6.44 GiB", -GiB: "-1.00 GiB", 2 * TiB: "2.00 TiB", math.MaxInt64: "8.00 EiB",
		math.MinInt64: "-8.00 EiB",
	} {
		if got := b.String(); got != want {
			t.Errorf("%d bytes are shown as %q, want %q", int64(b), got, want)
		}
	}
	if got := Bytes(5).Signed() + " " + Bytes(-5).Signed() + " " + Bytes(0).Signed(); got != "+5 B -5 B 0 B" {
		t.Errorf("signed: %s", got)
	}
}

// TestBytesTextIsClose reads the text back: it is within the last digit shown.
func TestBytesTextIsClose(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := Bytes(rapid.Int64Range(0, 1<<60).Draw(t, "bytes"))
		number, unit, _ := strings.Cut(b.String(), " ")
		value, err := strconv.ParseFloat(number, 64)
		if err != nil {
			t.Fatal(err)
		}
		for i, u := range append([]string{"B"}, units[:]...) {
			if u == unit {
				value *= math.Exp2(float64(10 * i))
			}
		}
		if math.Abs(value-float64(b)) > 0.0051*float64(b) {
			t.Fatalf("%d bytes are shown as %q", int64(b), b)
		}
	})
}

func TestCount(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64().Draw(t, "n")
		if got := strings.ReplaceAll(Count(n), ",", ""); got != strconv.FormatInt(n, 10) {
			t.Fatalf("%d is shown as %s", n, Count(n))
		}
	})
	if got := Count(494032768); got != "494,032,768" {
		t.Error(got)
	}
}

func TestParseBytes(t *testing.T) {
	for text, want := range map[string]Bytes{
		"80GiB": 80 * GiB, "80 GiB": 80 * GiB, "80g": 80 * GiB, "1.5GiB": 1536 * MiB, "24GB": 24e9, "512MB": 512e6,
		"1k": KiB, "1073741824": GiB, "7B": 7, " 1 TiB ": TiB, "0": 0,
	} {
		if got, err := ParseBytes(text); got != want || err != nil {
			t.Errorf("%q is %d (%v), want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "GiB", "-1GiB", "1XiB", "1e400", "NaN", "Inf", "9999999999999999TiB", "1 GiB 2",
		"0x10", "1,5GiB"} {
		if got, err := ParseBytes(text); err == nil {
			t.Errorf("%q is %d", text, got)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		b := Bytes(rapid.Int64Range(0, 1<<61).Draw(t, "bytes"))
		got, err := ParseBytes(b.String())
		if err != nil || math.Abs(float64(got-b)) > 0.0051*float64(b)+1 {
			t.Fatalf("%d is read back from %q as %d, %v", b, b, got, err)
		}
	})
}
