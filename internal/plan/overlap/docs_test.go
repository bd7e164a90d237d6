package overlap

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"plimsoll/internal/base/dtype"
	"plimsoll/internal/state/optim/kernel"
)

// TestTableOfTheDocs computes the table of docs/overlap.md: tokens from which on a dense model hides its update.
func TestTableOfTheDocs(t *testing.T) {
	text, err := os.ReadFile("../../../docs/overlap.md")
	if err != nil {
		t.Fatal(err)
	}
	const parameters = 1 << 30
	for _, host := range []struct {
		name             string
		bandwidth, flops float64 // of the host, and of each GPU
	}{
		{"GH200: 486 GB/s, 600 TFLOP/s", 486e9, 600e12},
		{"8 x H100: 490 GB/s, 400 TFLOP/s each", 490e9, 400e12},
	} {
		for _, mode := range []Mode{Forward, Backward} {
			row := fmt.Sprintf("| %s | `%s` |", host.name, mode)
			for _, moments := range []kernel.MomentType{kernel.MomentsFP32, kernel.MomentsBF16, kernel.MomentsInt8} {
				f := kernel.Format{State: kernel.Split, Moments: moments, Parameter: dtype.BF16, Gradient: dtype.BF16}
				r := Rates{HostBytes: HostBytes(f, float64(f.TrafficBytes(parameters))/parameters),
					Bandwidth: host.bandwidth, FLOPS: host.flops, Parameters: parameters, Active: parameters, Hosts: 1,
					Backward: 2}
				row += fmt.Sprintf(" %.1f Ki |", r.HiddenFrom(mode)/1024)
			}
			if !strings.Contains(string(text), row+"\n") {
				t.Errorf("docs/overlap.md lacks the row\n%s", row)
			}
		}
	}
}
