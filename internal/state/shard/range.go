package shard

// Range is Count consecutive numbers from First on: elements of a shard, of a parameter or of a stream, or chunks.
type Range struct {
	First, Count int64
}

// Between returns the elements from first up to, and without, end. If there are none the range is empty.
func Between(first, end int64) Range { return Range{first, max(0, end-first)} }

// End returns the element after the last.
func (r Range) End() int64 { return r.First + r.Count }

// Contains reports whether the range has an element.
func (r Range) Contains(element int64) bool { return r.First <= element && element < r.End() }

// Intersect returns the elements that both ranges have. It is empty if there are none.
func (r Range) Intersect(other Range) Range {
	return Between(max(r.First, other.First), min(r.End(), other.End()))
}

// Shift returns the range moved by a number of elements.
func (r Range) Shift(by int64) Range { return Range{r.First + by, r.Count} }

// Share returns one of several shares of the range. The shares cover the range in order, and their sizes differ by one
// element at most. Share cannot overflow.
func (r Range) Share(number, shares int) Range {
	each, rest := r.Count/int64(shares), r.Count%int64(shares)
	begin := func(number int) int64 { return r.First + each*int64(number) + rest*int64(number)/int64(shares) }
	return Between(begin(number), begin(number+1))
}
