package published

import (
	"strings"
	"testing"

	"plimsoll/internal/base/ledger"
)

// TestNearest holds the rule: the kind of device, then the engine, then the size.
func TestNearest(t *testing.T) {
	for _, x := range []struct {
		engine     string
		device     ledger.Kind
		parameters int64
		want       func(*Measurement) bool
	}{
		{"FSDP2", ledger.GPU, 8e9, func(m *Measurement) bool {
			return m.Engine == "FSDP2" && m.Parameters == 8030261248
		}},
		{"FSDP2", ledger.GPU, 1, func(m *Measurement) bool { return m.Engine == "FSDP2" }},
		{"FSDP3", ledger.GPU, 7e9, func(m *Measurement) bool { return strings.HasPrefix(m.Engine, "FSDP") }},
		{"DeepSpeed ZeRO-1", ledger.GPU, 8e9, func(m *Measurement) bool {
			return strings.HasPrefix(m.Engine, "DeepSpeed ZeRO-")
		}},
		{"another", ledger.Host, 8e9, func(m *Measurement) bool { return m.Device == ledger.Host }},
		{"FSDP2", "another", 8e9, func(m *Measurement) bool { return m == nil }},
	} {
		if m := Nearest(x.engine, x.device, x.parameters); !x.want(m) {
			t.Errorf("%s on a %s with %d parameters: %+v", x.engine, x.device, x.parameters, m)
		}
	}
	for i, a := range measurements() {
		far := float64(a.Parameters)
		if m := Nearest(a.Engine, a.Device, a.Parameters); m.Engine != a.Engine || float64(m.Parameters) != far {
			t.Errorf("line %d: %+v, nearest %+v", i+1, a, m)
		}
	}
}

// TestTable reads the table and writes it again.
func TestTable(t *testing.T) {
	var text strings.Builder
	for _, m := range measurements() {
		text.WriteString(m.Line())
		if m.Parameters <= 0 || m.Measured <= 0 || m.Planned <= 0 || !strings.HasPrefix(m.Source, "https://") {
			t.Errorf("%+v", m)
		}
	}
	if text.String() != table {
		t.Error("the table changed")
	}
}
