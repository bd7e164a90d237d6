package simulate

import "plimsoll/internal/base/ledger"

// hold is an allocated block on the GPU or on the host. The zero hold has none.
type hold struct {
	trace *trace
	id    int
}

// hold allocates a block. why gives the reason for the component's size.
func (t *trace) hold(bytes int64, component ledger.Component, why func() string) hold {
	if bytes <= 0 {
		return hold{}
	}
	return hold{t, t.Allocate(ledger.Bytes(bytes), component, why)}
}

// during holds a block while body runs.
func (t *trace) during(bytes int64, component ledger.Component, why func() string, body func()) {
	h := t.hold(bytes, component, why)
	body()
	h.free()
}

// briefly holds a block for a moment.
func (t *trace) briefly(bytes int64, component ledger.Component, why func() string) {
	t.hold(bytes, component, why).free()
}

// held reports whether there is a block.
func (h hold) held() bool { return h.trace != nil }

func (h hold) free() {
	if h.held() {
		h.trace.Free(h.id)
	}
}

// drop frees the block of a hold and empties the hold.
func drop(h *hold) {
	h.free()
	*h = hold{}
}
