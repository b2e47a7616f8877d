// What the collectives' results have to be, from their definitions, in float64 and in one place.
#ifndef TF_ADASUM_TESTS_CORE_EXPECTED_H_
#define TF_ADASUM_TESTS_CORE_EXPECTED_H_

#include <vector>

#include "ops/core/plan.h"
#include "values.h"

namespace core_test {

// Of one tensor, from each rank's.
Vector Expected(adasum::Op op, adasum::Algorithm algorithm, const std::vector<int>& host_of,
                const std::vector<Vector>& of_rank);

double Norm(const Vector& vector);
Vector Sum(const Vector& a, const Vector& b);
Vector Difference(const Vector& a, const Vector& b);
Vector Scaled(const Vector& a, double factor);

}  // namespace core_test

#endif  // TF_ADASUM_TESTS_CORE_EXPECTED_H_
