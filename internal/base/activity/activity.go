// Package activity is how work that takes a while says how far it has come.
package activity

// Unit is what the parts of an activity are.
type Unit int

// The units of activities. Of Shares only their part of the whole means something to a reader.
const (
	Counts Unit = iota
	Bytes
	Shares
)

// Progress follows what a verb is doing: activities one after the other, each of a number of parts.
type Progress interface {
	// Begin starts an activity of a number of parts, -1 where the number is not known.
	Begin(activity string, parts int64, unit Unit)
	// Advance reports parts as done. It may be called from many threads.
	Advance(parts int64)
	// End ends the activity.
	End()
}
