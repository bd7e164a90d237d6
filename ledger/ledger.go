// Package ledger is the account of bytes that every verb shares: a plan is a
// ledger, a measurement is a ledger, and a difference of the two answers most
// questions.
package ledger

// Device is where bytes are held.
type Device string

// The devices of the ledger.
const (
	Host Device = "host"
	GPU  Device = "gpu"
)

// Phase is the part of a job in which bytes are held.
type Phase string

// The phases of the ledger.
const (
	Initialize Phase = "initialize"
	Step       Phase = "step"
)

// WholeNode is the rank of an entry that belongs to no single rank.
const WholeNode = -1

// Entry says which device, rank, phase and component holds how many bytes,
// and why.
type Entry struct {
	Device    Device `json:"device"`
	Rank      int    `json:"rank"`
	Phase     Phase  `json:"phase"`
	Component string `json:"component"`
	Planned   Bytes  `json:"planned_bytes"`
	// Measured is nil where nothing was measured.
	Measured *Bytes `json:"measured_bytes"`
	// Why is the formula with its numbers and, where it is not ours, its
	// source.
	Why string `json:"why"`
}

// Ledger is a list of entries. The order is the order of the report.
type Ledger []Entry

// Planned is the sum of the planned bytes of the entries that keep holds for.
// A nil keep means all.
func (l Ledger) Planned(keep func(Entry) bool) Bytes {
	var sum Bytes
	for _, e := range l {
		if keep == nil || keep(e) {
			sum += e.Planned
		}
	}
	return sum
}

// Measured is the sum of the measured bytes of the entries that keep holds
// for; entries that were not measured count nothing.
func (l Ledger) Measured(keep func(Entry) bool) Bytes {
	var sum Bytes
	for _, e := range l {
		if e.Measured != nil && (keep == nil || keep(e)) {
			sum += *e.Measured
		}
	}
	return sum
}
